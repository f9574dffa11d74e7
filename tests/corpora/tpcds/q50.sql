-- How long after the sale items are returned to a store: five conditional counts.
select
  s_store_name, s_company_id, s_street_number, s_street_name, s_street_type, s_suite_number,
  s_city, s_county, s_state, s_zip,
  sum(case when sr_returned_date_sk - ss_sold_date_sk <= 30 then 1 else 0 end) as days_30,
  sum(case when sr_returned_date_sk - ss_sold_date_sk > 30
    and sr_returned_date_sk - ss_sold_date_sk <= 60 then 1 else 0 end) as days_60,
  sum(case when sr_returned_date_sk - ss_sold_date_sk > 60
    and sr_returned_date_sk - ss_sold_date_sk <= 90 then 1 else 0 end) as days_90,
  sum(case when sr_returned_date_sk - ss_sold_date_sk > 90
    and sr_returned_date_sk - ss_sold_date_sk <= 120 then 1 else 0 end) as days_120,
  sum(case when sr_returned_date_sk - ss_sold_date_sk > 120 then 1 else 0 end) as days_more
from store_sales
join store_returns
  on sr_ticket_number = ss_ticket_number and sr_item_sk = ss_item_sk
  and sr_customer_sk = ss_customer_sk
join store on s_store_sk = ss_store_sk
join date_dim as sold on sold.d_date_sk = ss_sold_date_sk
join date_dim as returned on returned.d_date_sk = sr_returned_date_sk
where returned.d_year = 2001 and returned.d_moy = 8
group by
  s_store_name, s_company_id, s_street_number, s_street_name, s_street_type, s_suite_number,
  s_city, s_county, s_state, s_zip
order by
  s_store_name, s_company_id, s_street_number, s_street_name, s_street_type, s_suite_number,
  s_city, s_county, s_state, s_zip, days_30, days_60, days_90, days_120, days_more
limit 100

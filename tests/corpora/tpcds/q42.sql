-- A manager's categories in a month.
select d_year, i_category_id, i_category, sum(ss_ext_sales_price) as price
from store_sales
join date_dim on d_date_sk = ss_sold_date_sk
join item on i_item_sk = ss_item_sk
where i_manager_id = 1 and d_moy = 11 and d_year = 2000
group by d_year, i_category_id, i_category
order by price desc, d_year, i_category_id, i_category
limit 100

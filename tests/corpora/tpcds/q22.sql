-- Average stock with subtotals by product, brand, class and category.
select i_product_name, i_brand, i_class, i_category, avg(inv_quantity_on_hand) as qoh
from inventory
join date_dim on d_date_sk = inv_date_sk
join item on i_item_sk = inv_item_sk
join warehouse on w_warehouse_sk = inv_warehouse_sk
where d_month_seq between 1200 and 1200 + 11
group by rollup (i_product_name, i_brand, i_class, i_category)
order by qoh, i_product_name, i_brand, i_class, i_category
limit 100
